"""Printed output of commands: tables and text."""

"""Verifier rules other than those proven by the walk over programs; coverage uses data prepared by the walk."""

"""What commands print: tables and text."""

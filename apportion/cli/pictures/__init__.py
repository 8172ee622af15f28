"""`apportion show --svg`: a plan as a picture."""

"""The properties that are checked, one file for each property or family of them; `catalogue` lists them all."""

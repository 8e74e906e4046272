"""When does it fail? A failing case is varied, and what it takes is said in the fewest conditions."""

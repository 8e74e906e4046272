"""Cases: the data that reproduces one example, and how cases are drawn, run, compared and shrunk."""

"""Cases: everything needed to run one example again, how they are drawn, run, shrunk and stored."""

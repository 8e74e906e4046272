"""Where ranks run: threads of one process (`simulated`) or processes of their own (`gloo`)."""

"""What a watched run sees: hazards, traffic and memory."""

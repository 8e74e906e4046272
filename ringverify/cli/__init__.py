"""The command line: a parser and a function for each command."""

"""Commands for maintainers: kill scores, false alarms, worlds compared, survey of published packages.

Only `ringverify mutants` imports it from outside.
"""

"""What maintainers run: kill scores, false alarms, worlds compared, the survey of packages. Nothing else imports it."""

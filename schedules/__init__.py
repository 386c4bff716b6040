"""Built-in schedules: one file per schedule, one folder per operator."""

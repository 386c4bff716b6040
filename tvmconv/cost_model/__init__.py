"""The cost model, trained from tuning logs: it predicts the time of configs, and lists configs that are often fast."""

"""The search for the fastest config: sessions, tuners, and simulated searches."""

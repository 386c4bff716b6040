"""Reports: tables and charts, as pure functions of what was measured and a thin layer that draws."""

"""Reports: tables and charts as pure functions of measurements, with a thin layer that draws."""

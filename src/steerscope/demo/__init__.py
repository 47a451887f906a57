"""`steerscope demo`: make a vector, test it, steer with it, and write one page that shows everything."""

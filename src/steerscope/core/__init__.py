"""The arithmetic of steering and the bookkeeping of rows. Pure torch: no engine, no model."""

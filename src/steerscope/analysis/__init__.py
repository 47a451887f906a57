"""Looking at vectors together: statistics and pages."""

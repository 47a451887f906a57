"""How long a test waits before it calls something hung. Nothing is measured against it: a machine that is busy, or
whose disk is cold, has been seen to take ten times as long as others to start an engine."""

HUNG_S = 1200.0

"""Other libraries on the same workload: one script per peer, each run in its own virtual environment by `run`.

A script is called `<peer>_peer.py`, because a file called `nnsight.py` would shadow the library it imports.
"""

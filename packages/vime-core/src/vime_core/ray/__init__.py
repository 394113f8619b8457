"""The launcher ``ray``: a trainer's ranks and the engines as Ray actors, on this machine or over a cluster.

Ray is imported when such a run starts, and nowhere before.
"""

"""``conserve doctor``: finds what is wrong with a machine or a cluster, and says what to do.

A check is a function that looks at the node it runs on, and returns findings. `node` runs those of
one node, `examine` has each node of a cluster run them, and `cluster` compares the nodes.
"""

"""``conserve doctor``: finds what is wrong with a machine or a cluster, and says what to do.

`observe` collects facts about a node, `examine` about all nodes of a cluster. Checks are plain
functions from facts to findings.
"""

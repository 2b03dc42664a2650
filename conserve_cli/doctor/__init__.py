"""``conserve doctor``: what is wrong with a machine or a cluster, and what to do about it.

Each module looks at one group of things. Its checks are plain functions: they take what was
observed (`conserve_cli.doctor.facts`) and return findings. `conserve_cli.doctor.examine` observes.
"""

"""`placement: elastic` beside the paper's, collocated engines and session affinity, simulated.

python -m experiments.elastic [--data FOLDER] [--seeds 0,1] [--out FOLDER]

With --out what was simulated before is not simulated again: it can be stopped, and gone on with.
"""

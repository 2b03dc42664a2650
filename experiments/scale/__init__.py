"""ConServe and other systems at the scale of the papers, simulated.

python -m experiments.scale [--data FOLDER] [--programs 24,48,96,120,144] [--out FOLDER]
"""

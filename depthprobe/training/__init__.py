"""Training: the recipe of the embedded model, and what it is made of.

    depthprobe train family-demo --seed 0 --out models/family-demo-0
"""

"""The ablation laboratory: from a file that describes a comparison to a report with a verdict.

It knows nothing of networks: it runs ``vitlab`` as a command and reads the run directories that this leaves.
"""

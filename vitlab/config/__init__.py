"""Words, variables and files become a configuration; ``vitlab fit --config t2t --model.lr=1`` passes in turn:

- ``options``: what belongs to the run, such as its name. ``arguments``: the other words as flags, of which it refuses
  unknown ones before torch is imported. ``environment``: flags from variables.
- ``parser``: reads the config files (``yaml_files``), puts words in order, and lets LightningCLI parse and build.
  ``parts``: keys that take a class with options, such as ``model.opt``, of which jsonargparse reads the class alone.
- ``explain`` and ``guesses``: a mistake as one line, and what was meant.
- ``trust`` and ``secret``: what a configuration may import, and what it may not contain.
- ``keys``: nested and dotted keys; which of them define an experiment.

Beside the way: ``callbacks`` and ``strategies`` check values of the trainer, ``help`` prints and writes ``flags.json``,
``images`` finds files that a user names, ``table_folds`` the folds of data.
"""

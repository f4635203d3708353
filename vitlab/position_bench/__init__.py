"""posbench: is a position embedding any good? One command trains it on equal terms with published ones and judges it.

``bench`` compares a method (``methods``) and tells how it stands, from cells that it finds (``cells``) or trains
(``running``) under a ``protocol``: a network trained on ``pictures`` (``training``) and asked about others
(``answers``), what it took (``costs``), and scores that ``judging`` compares. ``page`` publishes cells, and
``submission`` checks those of others.
"""

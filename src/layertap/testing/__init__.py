"""Tools that the tests of layertap and of its plug-ins share: tiny random models, the oracle, data strategies.

Nothing in the package imports this one. It needs nothing beyond layertap's own dependencies.
"""

"""The engines, by name. They never import one another; each is imported when it is first used."""

"""Does it work here, with this model? The examination behind `layertap doctor`."""

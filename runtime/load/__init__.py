"""From a bundle's files to the parts of a decoder: the table of engines, and both kinds of step."""

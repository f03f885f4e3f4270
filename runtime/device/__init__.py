"""The decode step on a device: its graphs, its arrays, and the devices themselves."""

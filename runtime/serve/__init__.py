"""Many requests at once: their queue and the thread that decodes them."""

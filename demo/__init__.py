"""The demo: a small target model, its draft heads, and the recipe that made both."""

"""What training and publishing have to agree on about a head's model card."""

CARD_NAME = "README.md"
# A card with this line was written by training, and publishing replaces it with a more complete one.
WRITTEN_BY_TRAINING = "<!-- written by training -->"

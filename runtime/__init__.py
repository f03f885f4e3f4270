"""Decoding: engines, the token tree, CTC search, acceptance and the loop. Reads engine bundles."""

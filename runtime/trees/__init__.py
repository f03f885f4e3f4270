"""Token trees and the searches that make them from a lattice. Pure numpy and numba."""

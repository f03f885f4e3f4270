"""What needs no engine: bundles, token trees and the searches that make them, errors and command lines."""

"""What every package may import: bundles, options, token trees and their searches, errors, command lines."""

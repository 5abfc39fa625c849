"""One declarative weight map per family: released names <-> our parameters."""

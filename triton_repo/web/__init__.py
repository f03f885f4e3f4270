"""What all web applications of the server share: listening, access, and limits of bodies."""

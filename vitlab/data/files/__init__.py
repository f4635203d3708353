"""From bytes at rest to images: decoded, scanned, listed in tables and archives, and divided into splits."""

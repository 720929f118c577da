"""What leaves a network's function unchanged: blocks, the layouts that find them, and their verification."""

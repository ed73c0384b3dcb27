"""Time to train: PPO until the return is there, by each library with the same network and constants."""

"""Communication between processes of one machine: arrays over one buffer, and sockets with messages and descriptors."""

"""What processes of one machine share: arrays over one buffer, and sockets with messages and descriptors."""

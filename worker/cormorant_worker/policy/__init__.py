"""Everything that decides on actions: loading a user's policy, acting with it, the policies that ship."""

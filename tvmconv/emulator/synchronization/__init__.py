"""How emulated threads wait for each other: barriers, mbarriers, groups of what is under way, and who goes on next."""

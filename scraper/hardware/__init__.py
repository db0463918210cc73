"""Power, utilisation and temperature of the machine, and the energy of the window."""

"""Files of AMD's rocprofv3."""
